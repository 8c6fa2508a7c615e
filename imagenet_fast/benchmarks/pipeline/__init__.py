"""Pipelines of stages against one device."""
