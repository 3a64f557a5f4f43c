"""What is learned and how: tasks, samples, PPO, the optimizer, checkpoints of a run."""
