"""A Spark master and two workers for tests, with executors in processes of their own, on two addresses.

Spark never starts a speculative copy on the host of the original, so one host, local or not, shows none. Master and
workers live in the driver's Java and end with it; so do the executors, which notice that it is gone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from tests.pipeline.running import FEW_ROWS
from tickwheel.pipeline.session import QUICK_JVM, SessionConfig, _log4j_file, build_session, class_options, find_java

HOSTS = ("127.0.0.1", "127.0.0.2")
EXECUTOR_MB = 512
"""Spark asks for 450 at least."""
SETTINGS = {
    "spark.driver.host": HOSTS[0],
    "spark.driver.bindAddress": HOSTS[0],
    "spark.executor.memory": f"{EXECUTOR_MB}m",
    "spark.sql.shuffle.partitions": "2",
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.minTaskRuntime": "1s",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.efficiency.enabled": "false",
    "spark.ui.liveUpdate.period": "0",
}


def two_workers(directory: Path, settings: dict[str, str]) -> SparkSession:
    """A session whose executors, of one core each, are two. `directory`: where they write what they say."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = HOSTS[0]
    # For the driver and for the executors.
    options = (*class_options(find_java()), QUICK_JVM, f"-Dlog4j2.configurationFile={_log4j_file()}")
    os.environ["JDK_JAVA_OPTIONS"] = " ".join(options)
    conf = SparkConf().set("spark.driver.memory", "512m").set("spark.ui.enabled", "false")
    SparkContext._ensure_initialized(conf=conf)
    jvm = SparkContext._jvm
    assert jvm is not None and SparkContext._gateway is not None
    plain = jvm.org.apache.spark.SparkConf()
    deploy = jvm.org.apache.spark.deploy
    url = deploy.master.Master.startRpcEnvAndEndpoint(HOSTS[0], 0, 0, plain)._1().address().toSparkURL()
    masters = SparkContext._gateway.new_array(jvm.java.lang.String, 1)
    masters[0] = url
    for number, host in enumerate(HOSTS):
        some, none = jvm.scala.Some(number), jvm.scala.Option.empty()
        deploy.worker.Worker.startRpcEnvAndEndpoint(
            host, 0, 0, 1, EXECUTOR_MB, masters, str(directory / host), some, plain, none
        )
    return build_session(SessionConfig(master=url, driver_memory="512m", settings={**FEW_ROWS, **SETTINGS, **settings}))
