"""The process of one parameter server: its loop, its sessions, its table."""
