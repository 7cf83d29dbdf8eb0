"""Ways of decoding against each other: the same prompts, in turns."""
