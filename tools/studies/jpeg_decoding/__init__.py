"""A study of faster ways to decode JPEGs: its data, experiments and table."""
