"""The chaos suite: real processes, real faults, an oracle that reads Redis' own log; see README.md."""
