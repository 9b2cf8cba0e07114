"""The results of planning: verdict, prediction, status and text."""
