"""Adapters for RL trainers, one per trainer. Each imports its trainer only when used."""
