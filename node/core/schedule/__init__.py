"""Messages on their way in and until they are dispatched."""
