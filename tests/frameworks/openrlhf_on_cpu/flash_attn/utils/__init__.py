"""What ring attention uses."""
