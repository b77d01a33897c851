"""Adapters to RL trainers, one per trainer; each imports its trainer only when used."""
