"""How the processes of a group find each other, and how a group is made."""
