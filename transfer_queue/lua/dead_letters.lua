-- needs: run
-- ARGV: limit. Returns rows {episode, outcome, attempts, journal}, oldest first.
local rows = {}
for i, episode in ipairs(call('ZRANGE', key('letters'), 0, tonumber(ARGV[1]) - 1)) do
  local v = call('HMGET', key('letter:' .. episode), 'outcome', 'attempts')
  rows[i] = {episode, v[1], tonumber(v[2]), call('HVALS', key('letter_journal:' .. episode))}
end
return rows
