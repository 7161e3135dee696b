"""Whether faults cost one bit: the same training run undisturbed, and again under faults drawn from a seed."""
