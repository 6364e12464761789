"""What llamakeep's speed and memory are held to. Run with `python -m benchmarks`."""
