"""The running system: members, their control plane and the life cycle of a version."""
