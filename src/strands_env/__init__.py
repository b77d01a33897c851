"""Environments of Strands agents: step, observe, reward. The names are in the packages below this one."""
