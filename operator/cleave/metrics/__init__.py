"""What the processes of one machine share."""
