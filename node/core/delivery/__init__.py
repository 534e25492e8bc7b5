"""Messages on their way to consumers and back."""
