"""Which devices and processes train together."""
