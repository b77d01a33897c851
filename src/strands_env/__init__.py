"""Environments of Strands agents: step, observe, reward. Empty until its own step of the plan."""
