"""`benchmarks scale`: a day of 1,000 simulated workers on a real broker, and real workers that die at once."""
