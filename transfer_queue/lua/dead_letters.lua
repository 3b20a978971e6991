-- needs: run
-- ARGV: start, limit; or an episode. Returns rows {episode, outcome, attempts, journal}, oldest first.
local function row(episode)
  local v = call('HMGET', key('letter:' .. episode), 'outcome', 'attempts')
  return {episode, v[1], tonumber(v[2]), call('HVALS', key('letter_journal:' .. episode))}
end

if #ARGV == 1 then
  return call('ZSCORE', key('letters'), ARGV[1]) and {row(ARGV[1])} or {}
end
local rows, start = {}, tonumber(ARGV[1])
for i, episode in ipairs(call('ZRANGE', key('letters'), start, start + tonumber(ARGV[2]) - 1)) do
  rows[i] = row(episode)
end
return rows
