"""The demonstration: a month of real flights, three processes, and the master killed half way."""
