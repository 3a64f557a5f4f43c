"""The running system: members, their control plane and the life of a version."""
