"""Bulk work on Spark: the data source `tickwheel`, bulk load, forecasts and audits, over DataFrames.

Needs the extra `tickwheel[spark]` and Java 17. Knows the wire (proto), the clients and the files (storage),
no node code. Import the module that is wanted; this one imports nothing, so that it costs nothing.
"""
