"""The demonstration of bulk work: a year of real flights through build, load, listing, forecast, sink and audit."""
