"""The web console: a process of its own that shows a cluster in a browser and changes what its user may change.

It talks to the cluster through tickwheel.client alone, with the token of whoever is logged in, so the cluster decides
what each may see and do. `cli.py` starts it; docs/CONSOLE.md describes it.
"""
