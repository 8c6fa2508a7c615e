"""What studies share: settings, runs and their log, tables, and pages made of them."""
