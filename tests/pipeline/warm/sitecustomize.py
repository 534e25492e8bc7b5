"""What Spark's Python workers import, imported once: before the daemon forks them rather than after, in each.

The session of these tests has this folder first in the PYTHONPATH of its Java. Spark imports after the fork since
libraries may have threads by then; those of numpy and pyarrow are made anew in the child. Sessions in processes of
their own, like that of test_sink_retries.py, do without.
"""

import sys

if "pyspark.daemon" in sys.orig_argv:
    import gc
    import importlib

    importlib.import_module(sys.orig_argv[-1])
    importlib.import_module("tickwheel.pipeline.source")
    if not sys.orig_argv[-1].endswith(("lookup_data_sources", "create_data_source")):
        importlib.import_module("pandas")  # pyarrow imports it with the first array
    gc.collect()
    gc.freeze()  # a worker collects garbage after each task, but not this
