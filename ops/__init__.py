"""The command `rolloutmq`, and what its commands share."""
