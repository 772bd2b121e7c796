"""Options of the gateway and of the commands on its database."""
