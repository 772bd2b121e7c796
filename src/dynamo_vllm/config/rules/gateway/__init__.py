"""Rules for options of the gateway and of the commands on its database."""
