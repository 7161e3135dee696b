-- An operator deletes a dead letter.
-- ARGV: prefix, letter
-- letter: its entry id.
-- Returns 1, or 0 if there is none.
return drop_letter(ARGV[2])
