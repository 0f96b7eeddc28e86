"""Other projects' argument lists, a module each: code written for them runs after a changed import."""
