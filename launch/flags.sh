# shellcheck shell=bash
# Flags of the scripts of this folder: read, and checked whole before arithmetic, YAML, ssh or a
# `case` sees them. Sourced by common.sh. Runs under bash 3.2 (macOS) and later.

# Print TEXT with blanks for what a terminal acts upon: control characters (Unicode's C1, too), line and
# paragraph separators, turns of the writing direction.
dapo_plain() {  # dapo_plain TEXT
    local LC_ALL=C
    local text="${1//[[:cntrl:]]/ }"
    text="${text//$'\xc2'[$'\x80'-$'\x9f']/ }" text="${text//$'\xe2\x80'[$'\xa8'-$'\xae']/ }"
    printf '%s' "${text//$'\xe2\x81'[$'\xa6'-$'\xa9']/ }"
}

dapo_fail() {  # dapo_fail MESSAGE [STATUS]: one line on stderr, whatever a user's value puts into it
    printf 'error: %s\n' "$(dapo_plain "$1")" >&2
    exit "${2:-1}"
}

# Whether VALUE is of KIND, one of
#   number:MIN:MAX  a whole number in base 10
#   word            for Cloud's and Kubernetes' names: letters, digits and ._:/@,- (word0: or nothing)
#   pairs           KEY=VALUE,... of such words
#   text            without control characters
#   any             not empty
#   python          a supported version
# Prints what is wanted where it is not.
dapo_check_kind() {  # dapo_check_kind KIND VALUE
    local LC_ALL=C kind="$1" value="$2" low high
    case "$kind" in
        number:*)
            low="${kind#*:}" high="${kind##*:}" low="${low%:*}"
            # One by one: a range may hold other scripts' digits. Ten fit bash's integers.
            case "$value" in
                "" | *[!0123456789]* | ???????????*) ;;
                *) ((10#$value < low || 10#$value > high)) || return 0 ;;
            esac
            printf 'wants a whole number from %s to %s' "$low" "$high" ;;
        word | word0)
            [[ ! "$value" =~ ^[A-Za-z0-9][A-Za-z0-9._:/@,-]*$ ]] || return 0
            [[ -n "$value" || "$kind" == word ]] || return 0
            printf 'wants letters, digits and . _ : / @ , - behind a letter or digit' ;;
        pairs)
            [[ ! "$value" =~ ^[A-Za-z0-9][A-Za-z0-9._:/@=,-]*$ || "$value" != *=* ]] || return 0
            printf 'wants KEY=VALUE,... of letters, digits and . _ : / @ -' ;;
        text)
            [[ -z "$value" || "$value" != "$(dapo_plain "$value")" ]] || return 0
            printf 'wants text without control characters' ;;
        any) [[ -z "$value" ]] || return 0; printf 'wants a value' ;;
        python)
            case "$value" in 3.11 | 3.12 | 3.13 | 3.14) return 0 ;; esac
            printf 'not supported; choose 3.11, 3.12, 3.13 or 3.14' ;;
    esac
    return 1
}

dapo_want() {  # dapo_want KIND NAME VALUE: fail unless the value of NAME is of that kind
    local wants
    wants="$(dapo_check_kind "$1" "$3")" || dapo_fail "$2=$3: $wants" 2
}

# Set a variable for each flag of "$@". KINDS lists them as 'name=KIND', a kind of dapo_check_kind or
# `switch` (--name, sets 1), and the commands, if there are any, as 'COMMAND=|run|stop|', which sets
# `action`. Dashes in names are underscores in variables; numbers lose leading zeros. What stands
# behind `--` becomes the array `training`.
dapo_flags() {  # dapo_flags KINDS "$@"; names with _ are not those of any flag
    local LC_ALL=C _kinds _name _kind _value
    _kinds=" ${1//$'\n'/ } "
    shift
    while (($#)); do
        _name="${1%%=*}" _value="${1#*=}" _kind=""
        if [[ "$1" == --[a-z]* && "$_kinds" == *" ${_name#--}="* ]]; then
            _name="${_name#--}" _kind=${_kinds#*" ${_name#--}="} _kind="${_kind%% *}"
        fi
        case "$_kind:$1" in
            :-h | :--help) usage; exit 0 ;;
            :--) shift; training=("$@"); return ;;
            switch:*=*) _kind="" ;;
            switch:*) _value=1 ;;
            :[a-z]*)
                _name=action _kind=${_kinds#*" COMMAND="} _kind="${_kind%% *}"
                [[ "$_kinds" == *" COMMAND="* && "$_kind" == *"|$1|"* ]] || _kind=""
                [[ -z "$_kind" || -z "$action" ]] || dapo_fail \
                    "one command at a time: '$action' or '$1'" 2 ;;
            word0:*=* | *:*=?*) ;;
            *) _kind="" ;;
        esac
        case "$_kind" in
            "") dapo_fail "unknown argument '$1' (flags are --name=value; see --help)" 2 ;;
            switch | '|'*) ;;
            *)
                dapo_want "$_kind" "--$_name" "$_value"
                [[ "$_kind" != number:* ]] || _value=$((10#$_value)) ;;
        esac
        printf -v "${_name//-/_}" '%s' "$_value"
        shift
    done
}

# The last --workdir= of the training flags; nothing if there is none.
dapo_workdir() {
    local flag found=""
    for flag in ${training[@]+"${training[@]}"}; do
        [[ "$flag" != --workdir=* ]] || found="${flag#*=}"
    done
    printf '%s' "$found"
}

# Print a command, and run it unless $dry_run is set.
dapo_call() {
    printf '+ ' >&2; printf '%q ' "$@" >&2; printf '\n' >&2
    [[ -n "${dry_run:-}" ]] || "$@"
}
