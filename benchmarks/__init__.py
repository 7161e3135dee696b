"""What the figures of README.md and of docs/ are made with; README.md here says how. Not part of the package."""
