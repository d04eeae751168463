"""Pretraining by multi-task TD: on some tasks, frozen afterwards, used on others (claims P10 to P13; Wang et al. 2025)."""
