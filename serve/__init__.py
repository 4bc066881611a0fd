"""What runs a server from a checkout: the model of the demo, the launcher, the demo. Not in the wheel."""
