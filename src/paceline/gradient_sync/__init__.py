"""How the gradients of all workers become one."""
