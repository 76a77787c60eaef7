"""From a prompt to text: loading, generations, slots and the scheduler."""
