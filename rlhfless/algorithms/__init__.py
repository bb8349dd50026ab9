"""Advantages, KL estimators and losses. Pure functions; import the modules themselves.

`batch` needs numpy alone, so a process that only packs does not load torch.
"""
