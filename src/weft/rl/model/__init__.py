"""The policy, as trainers and as engines hold it."""
