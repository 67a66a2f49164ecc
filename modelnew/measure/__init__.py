"""The measuring half: runs solutions beside their references and says what was found."""
