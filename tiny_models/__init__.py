"""The tiny default models, the questions that test their memory, and the script that trained them."""
