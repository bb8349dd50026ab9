"""Fakes and small inputs that several test folders share."""
