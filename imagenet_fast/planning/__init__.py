"""What a configuration will do: its time, memory and learning rates, before it runs."""
