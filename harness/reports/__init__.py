"""From one ledger to what people read: HTML, JUnit, Markdown, and plots over several runs."""
