-- needs: run, full
-- ARGV: packed update, nonce, how many are kept.
if first_time(ARGV[2]) then
  call('RPUSH', key('updates'), ARGV[1])
  call('LTRIM', key('updates'), -tonumber(ARGV[3]), -1)
end
return 1
