"""What a configuration will do before it runs: its rates, its step, its pipeline, its time."""
