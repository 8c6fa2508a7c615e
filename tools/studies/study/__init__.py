"""The common parts of all studies: settings, runs, their log, tables and pages."""
