"""Environments, rewards and evaluations for Strands agents. Import from the subpackages."""
