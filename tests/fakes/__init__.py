"""Stand-ins and small inputs that tests of more than one folder share."""
