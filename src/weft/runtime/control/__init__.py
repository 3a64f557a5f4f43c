"""How members talk: messages, the channel they travel on, keys, the control thread."""
