"""What is told about a plan: verdict, prediction, status and text."""
