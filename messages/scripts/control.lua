-- Say something to one worker, or to all.
-- ARGV: prefix, worker id ('' for all), encoded Control as hex (rings carry text)
ring('kind', 'control', 'worker', ARGV[2], 'm', ARGV[3])
return 'ok'
